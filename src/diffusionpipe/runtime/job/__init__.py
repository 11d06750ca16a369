"""Processes that are one job: how they meet, agree, watch each other and end."""
