#!/bin/sh
# Loads images of the local Docker into the nodes of a local Kubernetes cluster: kind, k3d or minikube. `make image-load` runs it.
#   load.sh IMAGE...
# kubectl's current context says which cluster; where its name does not, CLUSTER says the kind, and CLUSTER_NAME the name.
set -eu
context=$(kubectl config current-context 2>/dev/null) || context=""
case ${CLUSTER:-$context} in
    kind) tool=kind name=kind ;;
    kind-*) tool=kind name=${context#kind-} ;;
    k3d) tool=k3d name=k3s-default ;;
    k3d-*) tool=k3d name=${context#k3d-} ;;
    minikube) tool=minikube name=minikube ;;
    docker-desktop)
        echo "Docker Desktop's Kubernetes sees Docker's own images: nothing to load."
        exit 0
        ;;
    *)
        echo "kubectl's context is '$context', by which no kind, k3d or minikube is recognised." \
            "Set CLUSTER to kind, k3d or minikube, and CLUSTER_NAME to its name; for any other cluster push the images to a" \
            "registry: make image-push REGISTRY=REGISTRY" >&2
        exit 1
        ;;
esac
name=${CLUSTER_NAME:-$name}
for image in "$@"; do
    echo "Loading $image into $tool $name"
    case $tool in
        kind) kind load docker-image "$image" --name "$name" ;;
        k3d) k3d image import "$image" --cluster "$name" ;;
        minikube) minikube --profile "$name" image load "$image" ;;
    esac
done
