# install rules live here; filled by the packaging step
