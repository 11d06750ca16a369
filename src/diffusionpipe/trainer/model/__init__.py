"""The parts of a training that follow from its recipe: models, parameter groups, adapters, guidance, the workload."""
