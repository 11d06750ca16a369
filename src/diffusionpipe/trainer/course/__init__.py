"""The course of a run: its start, its steps one after the other, its records and its end."""
