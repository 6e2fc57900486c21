"""The object tier, step by step beside the reference model, over a folder and over buckets of two
kinds: one that refuses a second writer of a name, and one that does not."""

import pytest
from hypothesis import settings
from support.object.object_servers import ServerProcess
from support.object.object_subjects import FOLDER, BucketSubject

from kvtier.testing.stateful import SETTINGS, tier_machine

RCLONE, AZURITE = BucketSubject(""), BucketSubject("")
SOME = settings(SETTINGS, max_examples=25)
"""The tier is the same over a folder; servers and their client answer more slowly."""


class TestFolderBriefly(tier_machine(FOLDER).TestCase):  # type: ignore[misc]
    settings = SOME


@pytest.mark.slow
class TestFolder(tier_machine(FOLDER).TestCase):  # type: ignore[misc]
    """As many examples as for any tier."""


@pytest.mark.s3
@pytest.mark.slow
class TestRclone(tier_machine(RCLONE).TestCase):  # type: ignore[misc]
    settings = SOME

    @pytest.fixture(autouse=True)
    def server(self, rclone_server: ServerProcess, brief_settling: None) -> None:
        RCLONE.endpoint = rclone_server.endpoint


@pytest.mark.s3
@pytest.mark.slow
class TestAzurite(tier_machine(AZURITE).TestCase):  # type: ignore[misc]
    settings = SOME

    @pytest.fixture(autouse=True)
    def server(self, azurite_server: ServerProcess) -> None:
        AZURITE.endpoint = azurite_server.endpoint
