"""Schedules from files: orders of actions, and rules that generate them."""
