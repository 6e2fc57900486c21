"""What every mover promises (`contract`), and the media that it is tested with (`media`)."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.contract")
