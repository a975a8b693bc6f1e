"""Find a target or a drafter by the name a user gives it."""

import os

from .checkpoint import DRAFTER_FILES, TARGET_FILES, Source, find_source
from .demo import DEMO, demo_drafter, demo_target, is_demo
from .errors import DFlash2Error


def find_target(
    path_or_repo: str | os.PathLike,
    *,
    revision: str | None = None,
    offline: bool = False,
    files: tuple[str, ...] = TARGET_FILES,
) -> Source:
    """A target's files: `demo`, a folder or a Hub repository; see `find_source`.

    Raises:
        DFlash2Error: Nothing of that name exists or it cannot be had.
    """
    if not is_demo(path_or_repo):
        return find_source(
            path_or_repo, revision=revision, offline=offline, files=files
        )
    _refuse(revision)
    return Source(demo_target(offline=offline), DEMO)


def find_drafter(
    path_or_repo: str | os.PathLike,
    *,
    revision: str | None = None,
    offline: bool = False,
    files: tuple[str, ...] = DRAFTER_FILES,
) -> Source:
    """A drafter's files, as `find_target` finds a target's."""
    if not is_demo(path_or_repo):
        return find_source(
            path_or_repo, revision=revision, offline=offline, files=files
        )
    _refuse(revision)
    return Source(demo_drafter(), DEMO)


def _refuse(revision: str | None) -> None:
    if revision is not None:
        raise DFlash2Error(
            f"{DEMO}: the demo pair has no revisions; leave out revision {revision!r}"
        )
