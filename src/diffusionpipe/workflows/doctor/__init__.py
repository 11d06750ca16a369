"""The examination of machines and of the ranks of a job: facts, trials, findings."""
