"""The material of a training step: rollouts, conversations, tasks. It may import what `trainer` may. Begin with
`collector`."""
