"""Rehearsals: simulate shifts at home, adapt to them, and score the results, before the model reaches a site."""
