# SPDX-License-Identifier: Apache-2.0
"""Lets this interpreter's virtual environment see the distribution's pyverbs, which has no wheel.

A link to its folder, where it was built for this version of Python; nothing where it can be imported already.  Exits
with 1 and says what to do where neither helps.
"""

import importlib.util
import site
import sys
import sysconfig
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = Path("/usr/lib/python3/dist-packages/pyverbs")
"""Of Debian and Ubuntu."""


def link(target: Path, packages: Path, suffix: str) -> str:
    """Make the link.

    :param target: the distribution's folder.  :param packages: the environment's site-packages.
    :param suffix: of extension modules of this interpreter, such as ``.cpython-311-x86_64-linux-gnu.so``.
    :returns: what is wrong; empty when it is there now.
    """
    place = packages / "pyverbs"
    if not target.is_dir():
        return f"{target} is not there: install python3-pyverbs (Debian, Ubuntu), then run make again"
    if not (target / f"device{suffix}").is_file():
        built = ", ".join(sorted(path.name for path in target.glob("device.*.so"))) or "nothing that can be used"
        return (
            f"python3-pyverbs was built for another Python: it has {built}, and {sys.executable} wants device{suffix}. "
            "Make the environment with the distribution's own: make distclean, then PYTHON=/usr/bin/python3 make setup"
        )
    if place.is_symlink():
        place.unlink()
    elif place.exists():
        return f"{place} is neither a link nor can it be imported; remove it, then run make again"
    place.symlink_to(target)
    return ""


def main() -> int:
    """See the module's text.  :returns: exit code."""
    if importlib.util.find_spec("pyverbs") is not None:
        return 0
    wrong = link(DISTRIBUTION, Path(site.getsitepackages()[0]), sysconfig.get_config_var("EXT_SUFFIX"))
    if wrong:
        print(f"pyverbs: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
