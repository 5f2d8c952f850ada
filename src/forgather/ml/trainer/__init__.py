"""Trainers, and the checkpoint coordinator and manager that serve them."""
