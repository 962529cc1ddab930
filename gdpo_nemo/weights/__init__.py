"""Transfer of weights from the policy to the engines: manifests with checksums, and transports."""
