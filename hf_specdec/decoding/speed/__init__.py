"""What only makes decoding faster: captured rounds, weights packed for a CPU, the bits of plain decoding."""
