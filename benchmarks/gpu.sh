#!/usr/bin/env bash
# Everything that needs a GPU, in under ten minutes: the tests and both benchmarks on CUDA, written as dated tables.
#
#     benchmarks/gpu.sh [FOLDER]        # default: benchmarks/results
#
# PYTHON names the interpreter (default: python3). DEVICE=cpu tries the script itself where there is no GPU.
# EXACTNESS_ARGS, OVERHEAD_ARGS and PYTEST_ARGS are handed on. All parts run even if one fails; the exit status is 1 then.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

folder=${1:-benchmarks/results}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
today=$(date +%F)
mkdir -p "$folder" || exit 1
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# The last word of the device's name: "NVIDIA H200" gives h200.
name='import sys, torch; print((torch.cuda.get_device_name() if sys.argv[1] == "cuda" else "cpu").split()[-1].lower())'
machine=$("$python" -c "$name" "$device") || {
    echo "gpu.sh: got no working torch with device '$device' from '$python'; set PYTHON, or DEVICE=cpu to try the script" >&2
    exit 1
}

failed=()
# part NAME SECONDS COMMAND...: runs one part under its limit. The limits add up to less than ten minutes.
part() {
    local name=$1 limit=$2 start=$SECONDS status=0
    shift 2
    echo "== $name: $*"
    timeout --kill-after=10 "$limit" "$@" || status=$?
    echo "== $name: exit status $status after $((SECONDS - start)) s"
    [ "$status" -eq 0 ] || failed+=("$name: exit status $status, limit $limit s")
}

table() { echo "$folder/$1_${machine}_$today"; }

# shellcheck disable=SC2086 # the ..._ARGS are lists of words
part exactness 80 "$python" benchmarks/exactness.py --device "$device" ${EXACTNESS_ARGS:-} \
    --json "$(table exactness).json" -o "$(table exactness).md"
# shellcheck disable=SC2086
part overhead 160 "$python" benchmarks/overhead.py --device "$device" --pairs 20 --block 0.04 ${OVERHEAD_ARGS:-} \
    --json "$(table overhead).json" -o "$(table overhead).md"
# shellcheck disable=SC2086
part tests 320 "$python" benchmarks/suite.py --device "$device" --limit 300 --workers 8 -o "$(table tests).md" \
    -- ${PYTEST_ARGS:-}

if [ "${#failed[@]}" -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "written to $folder"
