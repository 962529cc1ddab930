#!/usr/bin/env bash
# The first hour on a GPU: what works, how fast, in how much memory, how exactly. Options: --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-python3}" tests/gpu/first_hour.py "$@"
