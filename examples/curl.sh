#!/bin/sh
# The smallest agent: one chat completion, plain and then streamed.
# OPENAI_BASE_URL and OPENAI_API_KEY say where the model is, as they always do.
set -eu

ask() {
    curl --silent --show-error --fail-with-body --no-buffer "$OPENAI_BASE_URL/chat/completions" \
        -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" -d "$1"
    echo
}

ask '{"model": "gpt-5-mini", "messages": [{"role": "user", "content": "Say hello."}]}'
ask '{"model": "gpt-5-mini", "stream": true, "messages": [{"role": "user", "content": "Say it slowly."}]}'
