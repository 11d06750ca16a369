"""Everything that is ready before step 1: the session, its plan, profile and cluster."""
