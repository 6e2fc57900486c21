#!/bin/sh
# A throw-away Ceph object gateway on loopback: one monitor, one OSD that keeps all in memory, one
# gateway. For conformance and figures against a real S3 server.
#
#   tests/object/radosgw.sh start FOLDER PORT   # prints when it answers; needs root
#   tests/object/radosgw.sh stop FOLDER
#
# Debian's packages: apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common
# Then: KVTIER_TEST_ENDPOINT=http://127.0.0.1:PORT pytest tests/object/stores/test_any_endpoint.py
set -eu

folder=$2
conf=$folder/ceph.conf

run() {  # in the background, its process id written down
    "$@" >>"$folder/$1.log" 2>&1 &
    echo $! >>"$folder/pids"
}

start() {
    port=$1
    mkdir -p "$folder/mon" "$folder/osd" "$folder/rgw"
    fsid=$(cat /proc/sys/kernel/random/uuid)
    monitor=$((port + 1))
    cat >"$conf" <<EOF
[global]
fsid = $fsid
mon host = v1:127.0.0.1:$monitor
auth cluster required = none
auth service required = none
auth client required = none
run dir = $folder
log file = $folder/\$name.log
admin socket = $folder/\$name.asok
pid file =
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon osd min in ratio = 0
ms bind ipv6 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
[mon.a]
mon data = $folder/mon
[osd.0]
osd data = $folder/osd
osd objectstore = memstore
memstore device bytes = 8589934592
osd class load list = *
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:$port
rgw max chunk size = 33554432
rgw put obj min window size = 33554432
EOF
    monmaptool --create --fsid "$fsid" --addv a "v1:127.0.0.1:$monitor" "$folder/monmap" >/dev/null
    ceph-mon -c "$conf" --mkfs -i a --monmap "$folder/monmap"
    run ceph-mon -c "$conf" -f -i a
    ceph -c "$conf" --connect-timeout 60 osd create >/dev/null
    ceph-osd -c "$conf" -i 0 --mkfs --osd-uuid "$(cat /proc/sys/kernel/random/uuid)"
    ceph -c "$conf" osd crush add osd.0 1.0 root=default host=here >/dev/null 2>&1
    run ceph-osd -c "$conf" -f -i 0
    run radosgw -c "$conf" -f -n client.rgw
    radosgw-admin -c "$conf" user create --uid=kvtier --display-name=kvtier \
        --access-key="${AWS_ACCESS_KEY_ID:?}" --secret-key="${AWS_SECRET_ACCESS_KEY:?}" >/dev/null
    for _ in $(seq 600); do
        if curl --silent --fail --output /dev/null "http://127.0.0.1:$port/"; then
            echo "http://127.0.0.1:$port"
            return
        fi
        sleep 0.1
    done
    echo "the gateway does not answer: see $folder" >&2
    exit 1
}

case $1 in
start) start "$3" ;;
stop) xargs kill <"$folder/pids" && rm "$folder/pids" ;;
esac
