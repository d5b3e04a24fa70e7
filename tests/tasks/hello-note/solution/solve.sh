#!/bin/bash
echo 'The kettle is on.' > /app/note.txt
