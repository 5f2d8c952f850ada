"""Tools for during and after training, as Python functions: the commands of `forgather` print their results.

Functions in this package neither print nor parse options. They return frozen dataclasses and raise the errors of
Forgather.
"""
