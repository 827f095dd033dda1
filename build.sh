#!/usr/bin/env bash
# Installs DeepInfer into the active Python environment, for the accelerator that
# DEEPINFER_ACCELERATOR names: nvidia, or nothing for a CPU. The variable must stay exported when
# the engine runs: it then asks for that device. Plain pip does the same, see README.md.
set -euo pipefail
cd "$(dirname "$0")"

python=${PYTHON:-python3}
case "${DEEPINFER_ACCELERATOR:-}" in
  nvidia)
    "$python" -m pip install -r requirements-nvidia.txt
    ;;
  "")
    "$python" -m pip install -c constraints.txt ./deepinfer-core
    ;;
  ascend)
    echo "error: DEEPINFER_ACCELERATOR=ascend: the Ascend backend is not in this version." >&2
    exit 1
    ;;
  *)
    echo "error: DEEPINFER_ACCELERATOR=$DEEPINFER_ACCELERATOR: expected nvidia, ascend or nothing." >&2
    exit 1
    ;;
esac
exec "$python" -m deepinfer doctor --quick
