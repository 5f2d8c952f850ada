"""Helpers of callbacks: handler signatures, checks of their state, records that are logged twice."""
