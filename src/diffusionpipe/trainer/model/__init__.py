"""From a recipe to what is trained: members, parameter groups, adapters, guidance, the workload."""
