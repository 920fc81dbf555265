"""Rehearsals: shifts simulated at home, adapted to and scored there, before the model meets a site."""
