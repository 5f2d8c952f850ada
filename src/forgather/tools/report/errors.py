"""Errors of reports."""


class ReportError(ValueError):
    """Directory without a run to report about, or a page that cannot be written."""
