"""The names by which `google.rpc.Status` details of our errors are sent and found."""

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "tandem"
