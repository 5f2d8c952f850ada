"""Tests of the examples: collected only by `make test-examples`, since each of them starts programs twice."""

import os

collect_ignore_glob = [] if os.environ.get("TEST_EXAMPLES") == "1" else ["test_*.py"]
