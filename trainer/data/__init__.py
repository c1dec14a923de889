"""The material of a training step: rollouts, tasks, examples. It may import what `trainer` may. Begin with
`collector`."""
