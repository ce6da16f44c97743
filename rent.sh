#!/usr/bin/env bash
# From a fresh rented machine to a trained, measured and published model. docs/renting.md explains it. The script can be
# run again at any point, on this machine or on a new one: it installs only what is missing, and a run that has begun
# continues, without another search and check. Plan, test and publication are repeated.
set -euo pipefail

usage() {
    cat <<'END'
Usage: ./rent.sh [OPTION]... RUN [DATASETS_DIR]

Set up this machine, check it, print the plan of RUN, train RUN, measure its
loss on the test split, and upload it (--publish). DATASETS_DIR [default:
datasets] is relative to this script's folder.

  --processes N         ranks, one for each GPU  [default: all GPUs, or 1]
  --mirror URL          keep a copy of the run at URL, and continue from it on a
                        new machine; none: no mirror  [default: train.json's]
  --fit                 first find the largest microbatch that fits, and put it
                        into train.json
  --publish OWNER/NAME  upload the model to the Hugging Face Hub
  --on-end COMMAND      shell command that ends the rental: runs once when all
                        else has ended or failed, if training has begun
                        (train.json's "on_end" does not wait for the test)
  --skip PART,...       leave out setup, check, plan, train or test
END
}

fail() { printf 'error: %s\n' "$1" >&2; exit 2; }

words=() skipped="" processes="" mirror="" publish="" on_end="" fits=false
while [ "$#" -gt 0 ]; do
    case "$1" in
        --help) usage; exit ;;
        --fit) fits=true ;;
        --skip | --processes | --mirror | --publish | --on-end)
            [ "$#" -gt 1 ] || fail "$1: needs a value (see ./rent.sh --help)"
            case "$1" in
                --skip) skipped+=",$2," ;;
                --processes) processes="$2" ;;
                --mirror) mirror="$2" ;;
                --publish) publish="$2" ;;
                --on-end) on_end="$2" ;;
            esac
            shift ;;
        -*) fail "$1: no such option (see ./rent.sh --help)" ;;
        *) words+=("$1") ;;
    esac
    shift
done
[ "${#words[@]}" -ge 1 ] && [ "${#words[@]}" -le 2 ] || fail "give one RUN, then DATASETS_DIR (see ./rent.sh --help)"
run="${words[0]}" datasets="${words[1]:-datasets}"
cd "$(dirname "${BASH_SOURCE[0]}")"
runs="${RUNS_DIR:-runs}" here="${RUNS_DIR:-runs}/$run"
[ -f "$here/train.json" ] || fail "$here: no such run; a run is a folder with model.json and train.json"
[ -n "$mirror" ] || # by sed, because there may be no Python before setup
    mirror="$(tr '\n' ' ' <"$here/train.json" | sed -n 's/.*"mirror"[[:space:]]*:[[:space:]]*"\([^"]*\)".*/\1/p')"
case "$processes" in *[!0-9]* | 0*) fail "--processes $processes: must be a whole number from 1 on" ;; esac
case "$publish" in "" | ?*/?*) ;; *) fail "--publish $publish: give OWNER/NAME" ;; esac
case "$skipped" in *,train,*) [ -z "$on_end" ] || fail "--on-end: runs after training, which is skipped; leave it out" ;; esac
for part in ${skipped//,/ }; do
    case "$part" in setup | check | plan | train | test) ;; *) fail "--skip $part: no such part (see --help)" ;; esac
done

# begin PART: succeed unless PART is skipped, and print its name and the time since the start.
begin() {
    case "$skipped" in *",$1,"*) return 1 ;; esac
    printf '\n== %s (%d min %d s after the start)\n' "$1" $((SECONDS / 60)) $((SECONDS % 60))
}

# Succeed if another process holds the run's lock for 20 s, which is long enough for ranks whose launcher was killed to
# save a checkpoint and end. Signals do not end the wait.
is_being_trained() {
    local held=0
    trap "" TERM INT
    [ ! -e "$here/.lock" ] || flock --wait 20 --conflict-exit-code 99 "$here/.lock" true || held=$?
    trap : TERM INT
    [ "$held" = 99 ]
}

# If something has failed, first try to send the mirror what it lacks, for an hour at most; a signal ends the push, but
# not this function. Then run COMMAND, with two exceptions: another process trains the run, and would end with the
# rental; or the trained model is on this machine alone, because --publish has not succeeded and there is no mirror.
end_rental() {
    trap "" PIPE HUP # the terminal may be closed
    if ! is_being_trained && ! "$is_sent" && [ -n "$mirror" ]; then
        # 2: refused, for example because another machine has the run. A push would fail if it could not print.
        timeout 3600 sh -c 'until uv run mirror.py push "$@" >/dev/null || [ "$?" = 2 ]; do sleep 30; done' \
            push "$run" "$mirror" "${where[@]}" &
        trap 'kill -TERM "$!"' TERM INT
        wait "$!" || true
    fi
    if is_being_trained; then
        echo "note: --on-end has not run: another process trains $run on this machine" >&2
        return
    elif "$is_unpublished" && [ -z "$mirror" ]; then
        echo "warning: --on-end has not run: $run is on this machine alone; publish it, then end the rental by hand" >&2
        return
    fi
    sh -c "$on_end" || echo "warning: --on-end failed; end the rental by hand" >&2
}

for folder in "${UV_INSTALL_DIR:-}" "${XDG_BIN_HOME:-}" "${XDG_DATA_HOME:-}/../bin" "${HOME:-/root}"/.{local,cargo}/bin; do
    PATH="$PATH${folder:+:$folder}" # where setup_lambda.sh finds uv, or installs it
done
if begin setup; then
    ./setup_lambda.sh
    extras=()
    case "$mirror" in s3:* | sftp:*) extras+=(--extra "${mirror%%:*}") ;; gs:*) extras+=(--extra gcs) ;; esac
    if grep -q '"benchmark_tasks"' "$here/train.json"; then extras+=(--extra benchmarks); fi
    # The variable keeps a build of torch that was installed by hand (docs/performance.md); `uv sync` ignores it.
    [ -n "${UV_NO_SYNC:-}" ] && [ -d .venv ] || uv sync ${extras[@]+"${extras[@]}"}
fi
[ -n "$processes" ] || processes="$(nvidia-smi --list-gpus 2>/dev/null | grep -c . || true)"
[ "${processes:-0}" != 0 ] || processes=1
where=(--runs-dir "$runs")
training=(uv run ddp_train.py "$run" "$datasets" --processes "$processes" "${where[@]}")
case "$mirror" in
    none) training+=(--mirror none) mirror="" ;;
    ?*) training+=(--mirror "$mirror" --wait) ;;
esac

# A run that an earlier machine began continues with the settings with which it began. Only keys that do not affect the
# result, such as price and limits, are taken from this machine's train.json.
is_begun=false
if [ -n "$(ls "$here/checkpoints" 2>/dev/null)" ]; then
    is_begun=true
elif [ -n "$mirror" ]; then
    listed="$(uv run mirror.py list "$mirror")" # a mirror that cannot be read ends the script
    if [[ $'\n'"$listed" == *$'\n'"$run: "* && $'\n'"$listed" != *$'\n'"$run: no whole checkpoint"* ]]; then
        is_begun=true
        rm -rf "$runs/.from-mirror"
        uv run mirror.py fetch "$mirror" "$run" --without-weights --runs-dir "$runs/.from-mirror"
        uv run python - "$here/train.json" "$runs/.from-mirror/$run/train.json" <<'END'
import json, pathlib, sys
from harness.common.errors import one_line_errors
from harness.common.json_files import read_json_object
from harness.runs.train_config import Affects, keys_affecting

here, there = map(pathlib.Path, sys.argv[1:])
with one_line_errors():
    mine, began = read_json_object(here), read_json_object(there)
free = {*keys_affecting(Affects.NOTHING)} - {"epochs"}  # with min_train_tokens -1, epochs sets the length of the run
both = {key: value for key, value in began.items() if key not in free}
both |= {key: value for key, value in mine.items() if key in free}
there.write_text(here.read_text() if both == mine else json.dumps(both, indent=4) + "\n")
END
        if ! cmp -s "$here/train.json" "$runs/.from-mirror/$run/train.json"; then
            mkdir -p "$here/aside"
            cp --backup=numbered "$here/train.json" "$here/aside/train.json"
            echo "note: settings in $here/train.json are now the mirror's; yours are in $here/aside/train.json" >&2
        fi
        mv "$runs/.from-mirror/$run/train.json" "$here/train.json"
        rm -r "$runs/.from-mirror"
    fi
fi
if ! "$is_begun"; then
    # -f comes first, because the check trains with train.json's microbatch.
    if "$fits"; then begin fit && uv run ddp_train.py "$run" "$datasets" -f --write --processes "$processes" "${where[@]}"; fi
    if begin check; then uv run check_machine.py "$run" --processes "$processes" "${where[@]}"; fi
fi
if begin plan; then "${training[@]}" --plan; fi
if begin train; then
    status=0 is_sent=false is_unpublished=false
    if [ -n "$on_end" ]; then trap end_rental EXIT; fi
    "${training[@]}" &
    # Without this, bash would end at once, and COMMAND would run while training saves its last checkpoint.
    trap 'kill -TERM "$!"' TERM INT HUP
    wait "$!" || status=$?
    while kill -0 "$!" 2>/dev/null; do wait "$!" || status=$?; done
    trap - TERM INT HUP
    [ "$status" = 0 ] || exit "$status"
    is_sent=true
    [ -z "$publish" ] || is_unpublished=true
fi
failed=0 # a model that cannot be measured is published all the same; only Ctrl-C ends the script
if begin test; then
    uv run test_loss.py "$datasets" "$run" "${where[@]}" || failed=$?
    if [ "$failed" != 130 ] && [ -n "$mirror" ]; then
        uv run mirror.py push "$run" "$mirror" "${where[@]}" || { failed=$? is_sent=false; }
    fi
    [ "$failed" != 130 ] || exit 130
fi
if [ -n "$publish" ] && begin publish; then
    uv run convert_hf.py publish "$run" "$publish" "${where[@]}"
    is_unpublished=false
fi
[ "$failed" = 0 ] || exit "$failed"
printf '\n== done after %d min %d s\n' $((SECONDS / 60)) $((SECONDS % 60))
