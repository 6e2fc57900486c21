"""The object tier keeps the contract of every tier, over each kind of store."""

import pytest
from support.object.object_servers import ServerProcess
from support.object.object_subjects import FOLDER, BucketSubject

from kvtier.testing.contract import TierContract

pytestmark = pytest.mark.usefixtures("patient_openings")


class TestFolder(TierContract):
    subject = FOLDER


@pytest.mark.s3
@pytest.mark.slow
class TestMoto(TierContract):
    """A store that can refuse; blocks are compressed where that helps."""

    @pytest.fixture(autouse=True)
    def server(self, moto_server: ServerProcess) -> None:
        type(self).subject = BucketSubject(moto_server.endpoint)


@pytest.mark.s3
@pytest.mark.slow
class TestRclone(TierContract):
    """A real process that checks signatures, and overwrites where it should refuse."""

    @pytest.fixture(autouse=True)
    def server(self, rclone_server: ServerProcess, brief_settling: None) -> None:
        type(self).subject = BucketSubject(rclone_server.endpoint)


@pytest.mark.s3
@pytest.mark.slow
class TestAzurite(TierContract):
    """Another cloud, by its own protocol: it checks signatures and refuses a second writer."""

    @pytest.fixture(autouse=True)
    def server(self, azurite_server: ServerProcess) -> None:
        type(self).subject = BucketSubject(azurite_server.endpoint)
