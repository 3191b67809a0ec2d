"""Ways out of a diagnosis: terminal, HTML, Perfetto, data frames. Each module stands alone and imports late."""
