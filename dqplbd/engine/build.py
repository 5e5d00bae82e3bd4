# SPDX-License-Identifier: Apache-2.0
"""Generate the C source of a cffi extension from the headers of the data plane.

The declarations are written once, in the header. What Python may call stands between two marker lines::

    /* cffi: begin */
    int dq_engine_run(struct dq_engine *engine);
    /* cffi: end */

A header may have several such blocks. Inside a block only plain declarations are allowed (cffi has no preprocessor):
types, enums, prototypes, and ``#define NAME integer``. A declaration that only cffi understands is written as
``/* cffi-only: extern "Python" void dq_on_event(int); */`` and uncommented here.

The build runs this file as a script; it needs cffi and nothing of this package.
"""

import argparse
import contextlib
import re
import sys
from pathlib import Path

import cffi

_BLOCK = re.compile(r"^[ \t]*/\* cffi: (begin|end) \*/[ \t]*$", re.MULTILINE)
_CFFI_ONLY = re.compile(r"/\*\s*cffi-only:(.*?)\*/", re.DOTALL)
_ATTRIBUTE = re.compile(r"\bDQ(?:PLB)?_API\b|__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)")


def declarations(header: Path) -> str:
    """Return what stands between the marker lines of ``header``, in order, ready for ``FFI.cdef``.

    :raises ValueError: a marker is missing its counterpart, or there is none at all.
    """
    text = header.read_text(encoding="utf-8")
    blocks: list[str] = []
    start: int | None = None
    for marker in _BLOCK.finditer(text):
        line = text.count("\n", 0, marker.start()) + 1
        if (marker[1] == "begin") != (start is None):
            raise ValueError(f"{header}:{line}: marker 'cffi: {marker[1]}' has no counterpart before it")
        if start is None:
            start = marker.end()
        else:
            blocks.append(text[start : marker.start()])
            start = None
    if start is not None:
        raise ValueError(f"{header}: 'cffi: begin' without '/* cffi: end */'")
    if not blocks:
        raise ValueError(f"{header}: no '/* cffi: begin */' line: nothing to declare to Python")
    return _ATTRIBUTE.sub("", _CFFI_ONLY.sub(r"\1", "\n".join(blocks)))


def generate(module: str, root: Path, headers: list[Path], output: Path) -> None:
    """Write the C source of extension ``module`` to ``output``.

    :param root: the folder that C sources include from; ``headers`` lie below it.
    """
    ffi = cffi.FFI()
    includes: list[str] = []
    for header in headers:
        try:
            ffi.cdef(declarations(header))
        except (cffi.CDefError, cffi.FFIError) as error:
            raise ValueError(f"{header}: cffi cannot read the declarations between its markers: {error}") from error
        name = header.resolve().relative_to(root.resolve()).as_posix().removeprefix("include/")
        includes.append(f'#include "{name}"')
    ffi.set_source(module, "\n".join(includes))
    with contextlib.redirect_stdout(None):  # cffi reports each file that it writes
        ffi.emit_c_code(str(output))


def main() -> int:
    """Parse the command line that Meson gives."""
    parser = argparse.ArgumentParser(description="Generate the C source of a cffi extension.")
    parser.add_argument("--module", required=True, help="full name of the extension, for example dqplbd.engine._native")
    parser.add_argument("--root", required=True, type=Path, help="folder that the headers are included from")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("headers", nargs="+", type=Path)
    args = parser.parse_args()
    try:
        generate(args.module, args.root, args.headers, args.output)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
