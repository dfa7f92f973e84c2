# Copy FROM to TO by way of a temporary name in TO's directory.
configure_file("${FROM}" "${TO}.new" COPYONLY)
file(RENAME "${TO}.new" "${TO}")
