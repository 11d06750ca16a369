"""Questions to the planner from options and recipes, their profiles, and the files beside a plan."""
