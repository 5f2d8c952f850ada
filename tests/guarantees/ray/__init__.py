"""Trainers inside Ray Train."""
