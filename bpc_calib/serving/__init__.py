"""BPC in vLLM: a plugin that ranks tokens in the decoding steps of a server."""
