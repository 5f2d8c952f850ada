"""Report of a run: one self-contained HTML page, an optional PNG, and the same data as Python objects.

`read_run` reads the files of an output directory, `write_report` writes the page. `forgather report` calls both.
"""

from forgather.tools.report.contents import RunReport
from forgather.tools.report.errors import ReportError
from forgather.tools.report.reading import read_run
from forgather.tools.report.writing import WrittenReport, watch_report, write_report

__all__ = ["ReportError", "RunReport", "WrittenReport", "read_run", "watch_report", "write_report"]
