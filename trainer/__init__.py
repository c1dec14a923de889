"""The learner: from samples to new weights. `config` is free of torch; `engine` is torch on one machine."""
