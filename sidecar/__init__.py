"""What stands beside a black-box agent: `penstock run` takes rollouts from the queue and runs a command for each."""
