#!/usr/bin/env bash
# Two ranks of a pipeline, each in a network namespace of its own, between them a link as slow as asked for.
#
#   sudo env PATH="$PATH" HOME="$HOME" scripts/slow_link.sh GBIT MS RECIPE [--key value ...]
#   sudo env PATH="$PATH" HOME="$HOME" scripts/slow_link.sh 1 0.5 recipes/pipeline/smollm2-2.yaml --limit 2
#
# sudo would leave out the environment's commands and the cache of targets.
#
# Needs root, ip and tc (iproute2); without them `link.gbit` and `link.ms` of the recipe hold messages back.
set -euo pipefail

fail() { echo "slow_link: $1" >&2; exit 2; }
[ $# -ge 3 ] || fail "GBIT MS RECIPE: must be given, got $*; such as 1 0.5 recipes/pipeline/smollm2-2.yaml"
gbit=$1 ms=$2; shift 2
for number in "$gbit" "$ms"; do
    [[ $number =~ ^[0-9]+(\.[0-9]+)?$ ]] || fail "GBIT and MS: must be numbers, got $number"
done
[ -f "$1" ] || fail "RECIPE: must be a file, got $1; such as recipes/pipeline/smollm2-2.yaml"
[ "$(id -u)" = 0 ] || fail "user: must be root, got $(id -un); use the recipe's keys link.gbit and link.ms"
for tool in ip tc; do
    command -v "$tool" > /dev/null || fail "$tool: must be installed, got none; install iproute2, or use link.gbit"
done

spaces=(drafttrain-$$-0 drafttrain-$$-1) ranks=()
remove() {
    for rank in "${ranks[@]}"; do kill "$rank" 2> /dev/null || true; done
    for space in "${spaces[@]}"; do ip netns delete "$space" 2> /dev/null || true; done
}
trap remove EXIT
for space in "${spaces[@]}"; do
    ip netns add "$space" 2> /dev/null ||
        fail "network namespaces: must be allowed, got none; use link.gbit and link.ms"
    ip -n "$space" link set lo up
done
ip link add name slow netns "${spaces[0]}" type veth peer name slow netns "${spaces[1]}" 2> /dev/null ||
    fail "veth: must be in the kernel, got none; use the recipe's keys link.gbit and link.ms"
for rank in 0 1; do
    ip -n "${spaces[rank]}" address add "10.199.0.$((rank + 1))/24" dev slow
    ip -n "${spaces[rank]}" link set slow up
    netem=(netem rate "${gbit}gbit" delay "${ms}ms")
    ip netns exec "${spaces[rank]}" tc qdisc add dev slow root "${netem[@]}" 2> /dev/null ||
        fail "tc netem: must be in the kernel, got none; use the recipe's keys link.gbit and link.ms"
done

export MASTER_ADDR=10.199.0.1 MASTER_PORT=29500 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 GLOO_SOCKET_IFNAME=slow
export DRAFTTRAIN_PARENT=$$ # ranks end with this script, however that ends
for rank in 0 1; do
    RANK=$rank ip netns exec "${spaces[rank]}" drafttrain pipeline "$@" &
    ranks+=($!)
done
status=0
for rank in "${ranks[@]}"; do wait "$rank" || status=$?; done
exit $status
