"""The object tier, step by step beside the reference model, over each kind of store."""

import pytest
from object_servers import ServerProcess
from object_subjects import FOLDER, BucketSubject

from kvtier.testing.stateful import tier_machine

MOTO, RCLONE = BucketSubject(""), BucketSubject("")


class TestFolder(tier_machine(FOLDER).TestCase):  # type: ignore[misc]
    """A folder."""


@pytest.mark.s3
@pytest.mark.slow
class TestMoto(tier_machine(MOTO).TestCase):  # type: ignore[misc]
    @pytest.fixture(autouse=True)
    def server(self, moto_server: ServerProcess) -> None:
        MOTO.endpoint = moto_server.endpoint


@pytest.mark.s3
@pytest.mark.slow
class TestRclone(tier_machine(RCLONE).TestCase):  # type: ignore[misc]
    @pytest.fixture(autouse=True)
    def server(self, rclone_server: ServerProcess) -> None:
        RCLONE.endpoint = rclone_server.endpoint
