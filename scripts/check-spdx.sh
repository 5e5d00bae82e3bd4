#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Fail when a source file does not name its licence in its first five lines.
set -euo pipefail
cd "$(dirname "$0")/.."

status=0
while IFS= read -r -d '' file; do
    if ! head -n 5 "$file" | grep -q 'SPDX-License-Identifier: Apache-2.0'; then
        printf '%s: no "SPDX-License-Identifier: Apache-2.0" comment in the first five lines\n' "$file" >&2
        status=1
    fi
done < <(
    find Makefile meson.build meson.options pyproject.toml .ci scripts dqplbd native tests systemd configs \
        -name __pycache__ -prune -o -type f \( \
        -name '*.c' -o -name '*.h' -o -name '*.in' -o -name '*.py' -o -name '*.pyi' -o -name '*.sh' -o -name '*.build' \
        -o -name '*.options' -o -name '*.toml' -o -name '*.service' -o -name '*.conf' \
        -o -name Makefile -o -path '.ci/*' \) -print0 2>/dev/null
)
exit "$status"
