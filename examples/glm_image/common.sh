# What the start scripts share. Settings come from the environment:
#   MODEL            a GLM-Image checkpoint: a directory, or a name that is downloaded
#   AR_FLAGS         more flags for the AR server
#   DIFFUSION_FLAGS  more flags for diffusion servers, head and denoisers
#   PORT             where requests go (default 30000)
# On a CPU host without weights, see docs/glm_image.md.
set -euo pipefail

MODEL=${MODEL:-zai-org/GLM-Image}
PORT=${PORT:-30000}
[ -d "$MODEL" ] || MODEL=$(python -c 'import sys, huggingface_hub as hub; print(hub.snapshot_download(sys.argv[1]))' "$MODEL")
read -ra ar_flags <<<"${AR_FLAGS:-}"
read -ra diffusion_flags <<<"${DIFFUSION_FLAGS:-}"
children=()

stop() {
    trap - EXIT INT TERM
    kill "${children[@]}" 2>/dev/null || true
    wait
}
trap stop EXIT INT TERM

# start GPUS COMMAND...: in the background, on these devices ("" leaves them as they are)
start() {
    local gpus=$1
    shift
    if [ -n "$gpus" ]; then CUDA_VISIBLE_DEVICES=$gpus "$@" & else "$@" & fi
    children+=($!)
}

# start_ar GPUS PORT FLAGS...: the AR model on SRT, honouring seeds
start_ar() {
    local gpus=$1 port=$2
    shift 2
    start "$gpus" sglang serve --model-path "$MODEL/vision_language_encoder" --tokenizer-path "$MODEL/processor" \
        --enable-multimodal --enable-deterministic-inference --port "$port" "$@" "${ar_flags[@]}"
}

# wait_for URL: until it answers
wait_for() {
    until curl -sf "$1" >/dev/null; do
        for child in "${children[@]}"; do kill -0 "$child"; done
        sleep 1
    done
}
