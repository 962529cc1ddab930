#!/bin/sh
# Healthy: the program answers, and the run that GDPO_RUN_DIR names, if any, wrote its metrics in the last GDPO_MAX_AGE_S
# seconds (3600). A run that has not written any yet is healthy while its config.yaml is that young.
set -eu

gdpo-nemo explain run.name > /dev/null

if [ -n "${GDPO_RUN_DIR:-}" ]; then
    file="$GDPO_RUN_DIR/metrics.jsonl"
    [ -s "$file" ] || file="$GDPO_RUN_DIR/config.yaml"
    age=$(($(date +%s) - $(stat -c %Y "$file")))
    if [ "$age" -gt "${GDPO_MAX_AGE_S:-3600}" ]; then
        echo "$file is $age s old"
        exit 1
    fi
fi
