"""Moving weights from the policy to the engines: a manifest, a transport, a proof of arrival."""
