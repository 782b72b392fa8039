#!/usr/bin/env bash
# Everything that needs a GPU, by one command: the tests and the benchmarks on it, written as dated tables.
#
#     benchmarks/gpu.sh [--dry] [FOLDER]        # default: benchmarks/results
#
# exactness and overhead beside a hand-written loop and Accelerate; the frontier under emulated 8, 12 and 24 GB; plans in
# allocated and reserved bytes beside what the allocator did, for models of the size of GPT-2 and ResNet-50 and an LSTM;
# copies hidden behind computation; torch.compile and CUDA graphs; the doctor's cost and its waits; and tests.
#
# --dry runs every part small, on the CPU and on the test accelerator, to try the script itself (FOLDER: a new one).
# PYTHON names the interpreter (default: python3). EXACTNESS_ARGS, OVERHEAD_ARGS, GPU_ARGS and PYTEST_ARGS are handed on.
# All parts run even if one fails; the exit status is 1 then.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

device=cuda dry=()
if [ "${1:-}" = --dry ]; then
    shift
    device=cpu dry=(--dry)
    EXACTNESS_ARGS="--quick ${EXACTNESS_ARGS:-}" OVERHEAD_ARGS="--quick --size MLP --feed bare ${OVERHEAD_ARGS:-}"
    PYTEST_ARGS="tests/integration/step/test_exactness.py -k token ${PYTEST_ARGS:-}"
    set -- "${1:-$(mktemp -d)}"
fi
folder=${1:-benchmarks/results}
python=${PYTHON:-python3}
today=$(date +%F)
mkdir -p "$folder" || exit 1
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# The last word of the device's name: "NVIDIA H200" gives h200.
name='import sys, torch; print((torch.cuda.get_device_name() if sys.argv[1] == "cuda" else "dry").split()[-1].lower())'
machine=$("$python" -c "$name" "$device") || {
    echo "gpu.sh: got no working torch with device '$device' from '$python'; set PYTHON, or give --dry to try the script" >&2
    exit 1
}

failed=()
# part NAME SECONDS COMMAND...: runs one part under its limit.
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
part exactness 120 "$python" benchmarks/exactness.py --device "$device" ${EXACTNESS_ARGS:-} \
    --json "$(table exactness).json" -o "$(table exactness).md"
# shellcheck disable=SC2086
part overhead 240 "$python" benchmarks/overhead.py --device "$device" --pairs 20 --block 0.04 ${OVERHEAD_ARGS:-} \
    --json "$(table overhead).json" -o "$(table overhead).md"
for one in plans offload compile doctor; do
    # shellcheck disable=SC2086
    part "$one" 600 "$python" benchmarks/gpu.py --part "$one" --machine "$machine" ${dry[@]+"${dry[@]}"} ${GPU_ARGS:-} -o "$folder"
done
# Those that are marked, and those of the engine with the device as the default one.
marked=$(grep -rl 'mark\.gpu' tests) engine="-p accelerator.suite --dist loadfile"
[ "$device" = cuda ] || marked="" engine=""
# shellcheck disable=SC2086
part tests 120 "$python" benchmarks/suite.py --device "$device" --limit 110 --workers 8 -o "$(table tests).md" \
    -- -m "gpu or not gpu" $marked ${PYTEST_ARGS:-}
# shellcheck disable=SC2086
PYTHONPATH="tests:$PYTHONPATH" ANYBATCH_TEST_DEVICE=$device \
    part engine 420 "$python" benchmarks/suite.py --device "$device" --limit 400 --workers 8 -o "$(table engine).md" \
    -- $engine ${PYTEST_ARGS:-}

if [ "${#failed[@]}" -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "written to $folder"
