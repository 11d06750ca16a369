"""Rehearsals: schedules run on virtual ranks of this machine."""
