"""The environment server: episodes over WebSocket, on top of `tbench2_env.isolation`."""
