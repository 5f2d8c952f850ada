"""Start-up of each Python process below the launcher: switches the rehearsal device on."""

import os

if os.environ.get("REHEARSAL") == "1":
    from tests.support.rehearsal.activation import activate

    activate()
