#!/bin/sh
# Starts Redis with redis.conf and the fleet's user, whose password comes from REDIS_PASSWORD and is
# written down as a hash only. Arguments are added as lines of the configuration: "port 7000".
set -eu
: "${REDIS_PASSWORD:?set REDIS_PASSWORD}"
here="$(cd "$(dirname "$0")" && pwd)"
umask 077
config="$(mktemp)"
hash="$(printf %s "$REDIS_PASSWORD" | sha256sum | cut -d' ' -f1)"
{
    cat "$here/redis.conf"
    # What administers a server stays forbidden, but for what the fleet and Celery read.
    printf 'user stepfleet on #%s ~* &* +@all -@admin -@dangerous +info +config|get +client|list +client|kill +role\n' "$hash"
    for line in "$@"; do printf '%s\n' "$line"; done
} >"$config"
exec redis-server "$config"
