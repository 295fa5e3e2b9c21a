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
# Mutual TLS between the containers, for ten years. The CA's key is thrown away; to renew, delete the three files.
if ! [ -s secrets/member_cert ]; then
    command -v openssl > /dev/null || { echo "openssl is missing: it makes the certificates" >&2; exit 1; }
    work="$(mktemp -d)"
    trap 'rm -rf "$work"' EXIT
    new_key="-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    # shellcheck disable=SC2086  # several words
    openssl req -x509 $new_key -days 3650 -subj "/CN=tandem-compose CA" -keyout "$work/ca.key" -out "$work/ca" 2> /dev/null
    # shellcheck disable=SC2086
    openssl req $new_key -subj "/CN=tandem-cluster" -keyout "$work/key" -out "$work/request" 2> /dev/null
    printf 'subjectAltName=DNS:tandem-cluster\nextendedKeyUsage=serverAuth,clientAuth\n' > "$work/extensions"
    openssl x509 -req -days 3649 -in "$work/request" -CA "$work/ca" -CAkey "$work/ca.key" -CAcreateserial \
        -extfile "$work/extensions" -out "$work/cert" 2> /dev/null
    for part in ca key cert; do cat "$work/$part" > "secrets/member_$part"; done
fi
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
