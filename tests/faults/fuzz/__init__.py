"""Checkpoints that somebody tampered with, by the thousand: each must load as it was, or be refused by name."""
