#!/bin/sh
# Creates the secrets of deploy/compose.yaml; existing files are kept. Prints where the first API key is.
set -eu
umask 077
cd "$(dirname "$0")"
mkdir -p secrets data/kernels data/prometheus data/grafana
random() { head -c 24 /dev/urandom | od -An -v -tx1 | tr -d ' \n'; }
once() { [ -s "secrets/$1" ] || printf '%s' "$2" > "secrets/$1"; }
digest() { printf 'sha256:%s' "$(printf '%s' "$(cat "secrets/$1")" | sha256sum | cut -d' ' -f1)"; }
once cluster_secret "$(random)"
once redis_password "$(random)"
once redis_auth "requirepass $(cat secrets/redis_password)
"
once first_key "sk-$(random)"
once metrics_key "sk-$(random)"
once grafana_password "$(random)"
once api_keys "api_keys:
  - {key: \"$(digest first_key)\", tenant: first}
  - {key: \"$(digest metrics_key)\", tenant: metrics, operator: true}
"
# Created before /metrics required an operator's key: Prometheus would be refused.
sed -i "s/^\(  - {key: .*, tenant: metrics\)}$/\1, operator: true}/" secrets/api_keys
# Containers run as a user who may read the secrets: you or, if you are root, an unprivileged user.
user="$(id -u):$(id -g)"
if [ "${user%%:*}" = 0 ]; then
    user=10001:10001
    chown -R "$user" secrets data
fi
[ -e .env ] || echo "TANDEM_USER=$user" > .env
echo "An API key: $PWD/secrets/first_key; Grafana's admin: $PWD/secrets/grafana_password"
